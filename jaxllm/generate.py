"""Continues a prompt, to see what a model has learned.

Each token takes a full forward pass over one row of fixed length: one compilation, no cache to be wrong. Meant for a few lines in a training
log; exports open in tools that serve.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import step as steps


def sample(
    graphdef, state, prompt_ids, num_tokens: int, *, eos_id: int | None = None, temperature: float = 0.0, seed: int = 0
):
    """Up to `num_tokens` ids that continue `prompt_ids` (a list of at least one), ending early at eos_id.

    temperature 0 takes the likeliest token, else tokens are drawn from softmax(logits / temperature)."""
    length = len(prompt_ids) + num_tokens

    @jax.jit
    def next_token(state, tokens, place, key):
        logits = steps.logits(graphdef, state, tokens[None])[0, place]
        drawn = jax.random.categorical(key, logits / max(temperature, 1e-6))
        return (drawn if temperature > 0 else jnp.argmax(logits)).astype(jnp.int32)

    tokens, made = np.zeros(length, np.int32), []
    tokens[: len(prompt_ids)] = prompt_ids
    for n in range(num_tokens):
        place = len(prompt_ids) + n
        token = int(next_token(state, tokens, np.int32(place - 1), jax.random.fold_in(jax.random.key(seed), n)))
        if token == eos_id:
            break
        tokens[place] = token
        made.append(token)
    return made
