"""The OpenAPI description of the REST API."""
