"""New tokens: a tokenizer that knows them, and embeddings that have a row for each.

The tokens are added to tokenizer.json itself, as text that is always cut out whole, so that they work in prompts,
completions and chats, and every reader of the folder has them. Left out on purpose: new control tokens, which a chat
template would have to write, and shrinking a vocabulary (merge trims).
"""

import shutil
from pathlib import Path

import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from torch import nn
from transformers import PreTrainedModel

from crosstrain.components.core.tokenizer import FILES, TOKENIZER_FILE


def extend_tokenizer(source: Path, folder: Path, new_tokens: tuple[str, ...]) -> list[Path]:
    """Write the tokenizer of `source` into `folder` with new tokens; the files, in order.

    Raises:
        ValueError: a token is there already, as one id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    backend = Backend.from_file(str(folder / TOKENIZER_FILE))
    for token in new_tokens:
        if backend.token_to_id(token) is not None:
            raise ValueError(f"new_tokens: {token!r} is a token of {source} already; leave it out")
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in new_tokens])
    backend.save(str(folder / TOKENIZER_FILE))
    return sorted(folder.iterdir())


def make_room(model: PreTrainedModel, known: int, size: int) -> None:
    """Give each id a row, and the rows of new ones the mean of the known ones, in embed_tokens and lm_head.

    Args:
        model: Its vocabulary grows if it is smaller than `size`; one padded beyond that stays.
        known: Ids of the tokenizer before.
        size: Ids of the tokenizer now.
    """
    if size > model.config.vocab_size:
        model.resize_token_embeddings(size, mean_resizing=False)
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    for weight in {id(layer.weight): layer.weight for layer in layers if isinstance(layer, nn.Module)}.values():
        assert isinstance(weight, torch.Tensor)
        with torch.no_grad():
            weight[known:size] = weight[:known].float().mean(0).to(weight.dtype)
