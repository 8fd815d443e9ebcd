#!/bin/sh
cd settings && python3 - <<'END'
import json


def merge(low, high):
    if not (isinstance(low, dict) and isinstance(high, dict)):
        return high
    both = {key: merge(low.get(key), high[key]) for key in high}
    return {key: value for key, value in (low | both).items() if key not in high or value is not None}


merged = merge(json.load(open("default.json")), json.load(open("override.json")))
json.dump(merged, open("merged.json", "w"))
END
