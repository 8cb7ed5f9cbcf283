"""The seams: Protocols that the parts meet at, so that no part imports another, and null objects
for what a part can do without. One file for each subject."""
