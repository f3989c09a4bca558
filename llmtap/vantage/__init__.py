"""Vantages are the places that observe traffic: the relay, the middleware, and network packets."""
