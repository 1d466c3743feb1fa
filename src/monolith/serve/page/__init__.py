"""The operator's page of a server: static files without a framework over a JSON document."""

from monolith.serve.page.page import Page, PageServer, Rollback, row_history, static_routes

__all__ = ["Page", "PageServer", "Rollback", "row_history", "static_routes"]
