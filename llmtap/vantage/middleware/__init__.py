"""Middlewares that measure inside an application and report to a meter as a relay does."""
