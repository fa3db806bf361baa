"""Model families. A family is a file with `Block`, `config_from_hf`, `config_to_hf` and `hf_weights`, and one line here."""

from jaxllm.models import llama, mixtral

FAMILIES = {"llama": llama, "mistral": llama, "mixtral": mixtral}
