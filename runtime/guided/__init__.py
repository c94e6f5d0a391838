"""Answers that keep to a grammar: from what a request asks for to what a session is told."""
