"""The configuration: sections, rules that hold across them, and how a file is loaded. Needs no
JAX."""
