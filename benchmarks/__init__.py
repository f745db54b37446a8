"""Speed of single parts: each module prints one JSON line."""
