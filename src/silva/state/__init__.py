"""Conversation state: identity, forest, turn codec, parsers. Pure: no I/O, no torch."""
