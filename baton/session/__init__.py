"""Sessions: long-lived authenticated message streams that outlive their connections."""
