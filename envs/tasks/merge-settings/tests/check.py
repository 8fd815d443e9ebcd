"""The reward is 1 if the merged settings are right."""

import json

EXPECTED = {
    "name": "shop",
    "server": {"host": "127.0.0.1", "port": 443, "tls": {"on": True, "versions": ["1.2", "1.3"]}},
    "limits": {"requests": 100},
    "tags": ["c"],
    "owner": {"team": "web"},
}

try:
    with open("/app/settings/merged.json") as file:
        merged = json.load(file)
except (OSError, ValueError):
    merged = None
with open("/logs/verifier/reward.txt", "w") as file:
    file.write(str(int(merged == EXPECTED)))
