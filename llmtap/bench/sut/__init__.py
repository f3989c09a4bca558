"""System under test: bench file, detection, validation, starter file."""
