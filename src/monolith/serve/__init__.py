"""Exported models: a folder with everything a prediction needs, and the predictor that loads it."""

from monolith.serve.client import Client
from monolith.serve.export import export_model
from monolith.serve.manifest import Signature
from monolith.serve.predictor import Predictor, import_saved_model, load

__all__ = ["Client", "Predictor", "Signature", "export_model", "import_saved_model", "load"]
