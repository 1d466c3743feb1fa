"""Losses of recommendation models, as functions. Predictions come first, labels second, as in `torch.nn.functional`."""

from monolith.nn.losses.batch_softmax import batch_softmax_loss
from monolith.nn.losses.grad_norm import GradNorm, GradNormLosses
from monolith.nn.losses.inbatch_auc import inbatch_auc_loss
from monolith.nn.losses.lambda_weights import (
    DCGLambdaWeight,
    ListMLELambdaWeight,
    PrecisionLambdaWeight,
    create_mrr_lambda_weight,
    create_ndcg_lambda_weight,
)
from monolith.nn.losses.pointwise import LossAndPred, get_sigmoid_loss_and_pred, get_softmax_loss_and_pred
from monolith.nn.losses.ranking import (
    approx_ndcg_loss,
    list_mle_loss,
    mean_squared_loss,
    pairwise_hinge_loss,
    pairwise_logistic_loss,
    pairwise_soft_zero_one_loss,
    sigmoid_cross_entropy_loss,
    softmax_loss,
)
from monolith.nn.losses.ranking_lists import RankingLists, group_by_rank_id, make_loss_fn

__all__ = [
    "DCGLambdaWeight",
    "GradNorm",
    "GradNormLosses",
    "ListMLELambdaWeight",
    "LossAndPred",
    "PrecisionLambdaWeight",
    "RankingLists",
    "approx_ndcg_loss",
    "batch_softmax_loss",
    "create_mrr_lambda_weight",
    "create_ndcg_lambda_weight",
    "get_sigmoid_loss_and_pred",
    "get_softmax_loss_and_pred",
    "group_by_rank_id",
    "inbatch_auc_loss",
    "list_mle_loss",
    "make_loss_fn",
    "mean_squared_loss",
    "pairwise_hinge_loss",
    "pairwise_logistic_loss",
    "pairwise_soft_zero_one_loss",
    "sigmoid_cross_entropy_loss",
    "softmax_loss",
]
