"""Long sequences: every worker of an axis has a part of the tokens."""
