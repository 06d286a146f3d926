"""The nouns of Baton: ids, requests, workers, life cycles and errors. Standard library only; knows no one above it."""
