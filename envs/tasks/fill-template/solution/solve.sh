#!/bin/sh
python3 - <<'END'
import os
import re

text = open("service.conf.template").read()
filled = re.sub(r"\{\{(\w+)\}\}", lambda match: os.environ.get(match[1], match[0]), text)
open("service.conf", "w").write(filled)
END
