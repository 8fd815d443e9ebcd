# It would ask the model what to remember of the session.
mkdir -p ~/.qwen
echo "{\"memory\": {\"enableManagedAutoMemory\": false}}" > ~/.qwen/settings.json
qwen --yolo --prompt "$1"
cat answer.txt
