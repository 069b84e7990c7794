"""Looped and growing language models for Hugging Face Transformers: importing the package registers them."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_looped import LoopedConfig
from .modeling_looped import (
    LoopedForCausalLM,
    LoopedForQuestionAnswering,
    LoopedForSequenceClassification,
    LoopedForTokenClassification,
    LoopedModel,
    LoopedPreTrainedModel,
)

AutoConfig.register(LoopedConfig.model_type, LoopedConfig, exist_ok=True)
# save_pretrained writes the code of a class that has an auto class beside the weights
LoopedConfig.register_for_auto_class()
for auto_class, model_class in {
    AutoModel: LoopedModel,
    AutoModelForCausalLM: LoopedForCausalLM,
    AutoModelForSequenceClassification: LoopedForSequenceClassification,
    AutoModelForTokenClassification: LoopedForTokenClassification,
    AutoModelForQuestionAnswering: LoopedForQuestionAnswering,
}.items():
    auto_class.register(LoopedConfig, model_class, exist_ok=True)
    model_class.register_for_auto_class(auto_class.__name__)

__all__ = [
    "LoopedConfig",
    "LoopedForCausalLM",
    "LoopedForQuestionAnswering",
    "LoopedForSequenceClassification",
    "LoopedForTokenClassification",
    "LoopedModel",
    "LoopedPreTrainedModel",
]
