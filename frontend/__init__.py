"""Text in, text out: HTTP, the client endpoint, tokenizing and detokenizing."""
