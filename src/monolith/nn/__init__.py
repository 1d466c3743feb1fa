"""Embedding modules with autograd over tables, gradient clipping, and the layers and losses of recommendation models."""

from monolith.nn.clip import clip_grad_norm_, clip_grads_
from monolith.nn.collection import EmbeddingBagCollection, dense_state_dict, embedding_collections
from monolith.nn.embedding import Embedding, EmbeddingBag
from monolith.nn.heads import Head
from monolith.nn.layers.cross import CAN, DCN
from monolith.nn.layers.dense import AddBias, BatchNorm, Dense, Sigmoid2
from monolith.nn.layers.feature_selection import IRazor, MixedEmbedding, SENet
from monolith.nn.layers.interaction import CIN, FFM, FM, AllInt, AutoInt, CDot, DotInteraction
from monolith.nn.layers.mlp import MLP, LHUCTower, LogitCorrection, MLPOptions, auxiliary_loss, correct_logits
from monolith.nn.layers.multitask import SNR, MMoE, continuous_topk, fid_counter, gumbel_keys, sample_subset
from monolith.nn.layers.sequence import (
    AGRU,
    DIEN,
    DIN,
    DMRU2I,
    AGRUCell,
    AvgPooling,
    MaxPooling,
    SumPooling,
    sequence_mask,
)
from monolith.nn.losses.classification import (
    GradNorm,
    batch_softmax_loss,
    get_sigmoid_loss_and_pred,
    get_softmax_loss_and_pred,
    inbatch_auc_loss,
)
from monolith.nn.losses.lambda_weights import (
    DCGLambdaWeight,
    ListMLELambdaWeight,
    PrecisionLambdaWeight,
    create_mrr_lambda_weight,
    create_ndcg_lambda_weight,
)
from monolith.nn.losses.ranking import (
    approx_ndcg_loss,
    group_by_rank_id,
    list_mle_loss,
    make_loss_fn,
    mean_squared_loss,
    pairwise_hinge_loss,
    pairwise_logistic_loss,
    pairwise_soft_zero_one_loss,
    sigmoid_cross_entropy_loss,
    softmax_loss,
)

__all__ = [
    "AGRU",
    "AGRUCell",
    "AddBias",
    "AllInt",
    "AutoInt",
    "AvgPooling",
    "BatchNorm",
    "CAN",
    "CDot",
    "CIN",
    "DCGLambdaWeight",
    "DCN",
    "DIEN",
    "DIN",
    "DMRU2I",
    "Dense",
    "DotInteraction",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "FFM",
    "FM",
    "GradNorm",
    "Head",
    "IRazor",
    "LHUCTower",
    "ListMLELambdaWeight",
    "LogitCorrection",
    "MLP",
    "MLPOptions",
    "MMoE",
    "MaxPooling",
    "MixedEmbedding",
    "PrecisionLambdaWeight",
    "SENet",
    "SNR",
    "Sigmoid2",
    "SumPooling",
    "approx_ndcg_loss",
    "auxiliary_loss",
    "batch_softmax_loss",
    "clip_grad_norm_",
    "clip_grads_",
    "continuous_topk",
    "correct_logits",
    "create_mrr_lambda_weight",
    "create_ndcg_lambda_weight",
    "dense_state_dict",
    "embedding_collections",
    "fid_counter",
    "get_sigmoid_loss_and_pred",
    "get_softmax_loss_and_pred",
    "group_by_rank_id",
    "gumbel_keys",
    "inbatch_auc_loss",
    "list_mle_loss",
    "make_loss_fn",
    "mean_squared_loss",
    "pairwise_hinge_loss",
    "pairwise_logistic_loss",
    "pairwise_soft_zero_one_loss",
    "sample_subset",
    "sequence_mask",
    "sigmoid_cross_entropy_loss",
    "softmax_loss",
]
