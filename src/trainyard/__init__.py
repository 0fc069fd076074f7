"""Trainyard: pretrains GPT-3-class language models from raw text, from one run file."""

__version__ = "0.1.0"
