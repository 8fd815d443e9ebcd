"""The reward is 1 if all rows are right; `rows_right` is how many are."""

import csv
import json

EXPECTED = [
    ["name", "city", "cents"],
    ["Amara", "Lagos", "3000"],
    ["Bruno", "Porto, Norte", "2000"],
    ["Chiyo", "Sendai", "100001"],
    ["Dilan", "Izmir", "0"],
    ["Elin", "Uppsala", "5"],
]

try:
    with open("/app/totals.csv", newline="") as file:
        rows = list(csv.reader(file))
except (OSError, ValueError, csv.Error):
    rows = []
rows_right = sum(row in rows for row in EXPECTED[1:])
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": int(rows == EXPECTED), "rows_right": rows_right}, file)
