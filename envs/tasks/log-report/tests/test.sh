#!/bin/sh
cat > /logs/expected <<'END'
10.0.3.21 37
172.16.9.1 19
10.0.0.7 18
END
right=no
sed 's/[[:space:]]*$//' /app/report.txt > /logs/found && cmp -s /logs/expected /logs/found && right=yes
if [ $right = yes ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
