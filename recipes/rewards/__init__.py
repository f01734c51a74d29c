"""Rewards and the verifiers that compute them."""
