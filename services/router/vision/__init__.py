"""Images of a request, up to the workers: limits, header, identity and placeholders. Pure; decodes no pixels."""
