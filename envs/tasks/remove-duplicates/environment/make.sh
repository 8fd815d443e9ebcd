mkdir -p box/a box/b/c 'box/z z'
echo one > box/a/1.txt
echo one > box/b/first.txt
echo one > 'box/z z/again.txt'
echo two > box/b/c/2.txt
echo two > box/b/2.txt
echo three > box/b/c/3.txt
: > box/empty
: > box/b/empty
printf 'one' > box/nearly.txt
