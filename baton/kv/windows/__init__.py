"""Window parts of pages in slots of their own."""
