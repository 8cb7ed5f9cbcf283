"""Prompts, records, tokenizers and chat formats."""
