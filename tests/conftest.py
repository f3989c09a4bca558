"""What holds for all tests."""

from hypothesis import settings

# How long an example takes says something about the machine, and here nobody asks.
settings.register_profile("llmtap", deadline=None)
settings.load_profile("llmtap")
