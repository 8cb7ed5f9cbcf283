"""Interfaces: Protocols between the parts, so no part imports another, and null objects for what a
part can do without. One file for each subject."""
