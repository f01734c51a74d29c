"""Serve every room, recipes/ and containers/. Imports only the standard library."""
