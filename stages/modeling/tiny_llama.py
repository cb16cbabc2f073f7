"""Build a byte-level BPE tokenizer and a small LLaMA from a site's own text, without a download."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stages.modeling.tokenizer import PAD

BOS, EOS = "<s>", "</s>"  # with PAD distinct tokens, ids 0, 1, 2


def train_tokenizer(texts: Iterable[str], vocabulary_tokens: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE (no unknown token) that begins every text with BOS, as LLaMA's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_tokens,
        special_tokens=[PAD, BOS, EOS],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def build_small_llama(tokenizer, **sizes) -> LlamaForCausalLM:
    """Build a LLaMA with random weights and tied embeddings; sizes: arguments of LlamaConfig."""
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, **sizes))
