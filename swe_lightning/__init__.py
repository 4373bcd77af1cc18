"""swe-lightning: experiments on the model behind a coding agent, with the real harness in the loop."""

__version__ = "0.1.0"
