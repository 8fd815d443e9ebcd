#!/bin/sh
cat > words.py <<'END'
import re
import sys
from collections import Counter

counts = Counter(re.findall("[a-z]+", sys.stdin.read().lower()))
for word in sorted(counts, key=lambda word: (-counts[word], word))[: int(sys.argv[1])]:
    print(word, counts[word])
END
