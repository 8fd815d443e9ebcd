"""mini-swe-agent: a shell in the workspace, by tool calls through litellm."""

import os
import sys
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # No download of prices.
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model

model = get_model(
    "openai/" + os.environ["OPENAI_MODEL"],
    {"model_kwargs": {"api_base": os.environ["OPENAI_BASE_URL"]}, "cost_tracking": "ignore_errors"},
)
agent = DefaultAgent(
    model,
    LocalEnvironment(),
    system_template="You work in a shell.",
    instance_template="{{task}}",
)
agent.run(sys.argv[1])
print(Path("answer.txt").read_text().strip())
