#!/bin/sh
cat > backup.sh <<'END'
#!/bin/sh
# backup.sh FROM TO: copies every .txt file of FROM (not of folders in it) into TO, and says how many.
from=$1
to=$2
mkdir -p -- "$to"
count=0
for file in "$from"/*.txt; do
  [ -f "$file" ] || continue
  cp -- "$file" "$to/"
  count=$((count + 1))
done
echo "$count"
END
