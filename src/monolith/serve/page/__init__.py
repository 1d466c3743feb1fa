"""The operator's page of a server: static files without a framework over a JSON document."""

from monolith.serve.page.overview import Overview, PageServer
from monolith.serve.page.page import Page, RunCollector, row_history, static_routes

__all__ = ["Overview", "Page", "PageServer", "RunCollector", "row_history", "static_routes"]
