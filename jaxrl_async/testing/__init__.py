"""Doubles for tests: scripted clocks, samplers and faults."""
