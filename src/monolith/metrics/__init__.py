"""Streaming metrics for evaluation and progress displays, and summaries for TensorBoard."""

from monolith.metrics.auc import AUC, WindowedAUC
from monolith.metrics.gauc import GAUC
from monolith.metrics.losses import MAE, MSE, RMSE, Calibration, CalibrationBucket, LogLoss, NormalizedEntropy
from monolith.metrics.metric import Metric
from monolith.metrics.summary import feature_insight_data, nas_data, write_summary

__all__ = [
    "AUC",
    "Calibration",
    "CalibrationBucket",
    "GAUC",
    "LogLoss",
    "MAE",
    "MSE",
    "Metric",
    "NormalizedEntropy",
    "RMSE",
    "WindowedAUC",
    "feature_insight_data",
    "nas_data",
    "write_summary",
]
