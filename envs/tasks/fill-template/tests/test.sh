#!/bin/sh
cat > /logs/expected <<'END'
# Written by hand: cost in $, not ${currency}.
name = billing
url = http://billing.internal:9042/v1
listen = 0.0.0.0:9042
literal = {{9042
unknown = {{SERVICE_OWNER}}
END
right=no
cmp -s /logs/expected /app/service.conf && right=yes
if [ $right = yes ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
