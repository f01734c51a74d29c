"""Provide helpers for launch/, recipes/ and containers/. Importing them needs no other package."""
