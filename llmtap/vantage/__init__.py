"""Vantages, which observe traffic and send frames to a meter: relay, middleware, network packets."""
