"""Drafts of tokens that a request may get next, so that a step may bring it several."""
