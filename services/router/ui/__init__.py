"""The page at `/`: files in `static/` and `vendor/`, served as they are. No build step."""
