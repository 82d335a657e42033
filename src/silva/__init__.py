"""Silva: train a language model inside the agent that people already have."""

__version__ = "0.1.0"
