"""Replacements for parts of vLLM that give a wrong or slow answer."""
