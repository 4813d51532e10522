"""Images from the request to the sample."""
