"""Numbers from Exchanges: pure maths, one function per term, each defined in DEFINITIONS.md."""
