mkdir -p ~/.pi/agent
cat > ~/.pi/agent/models.json <<EOF
{"providers": {"run": {
  "baseUrl": "$OPENAI_BASE_URL", "apiKey": "OPENAI_API_KEY", "api": "openai-completions",
  "models": [{"id": "$OPENAI_MODEL"}]
}}}
EOF
PI_OFFLINE=1 pi --print --no-session --provider run --model "$OPENAI_MODEL" "$1"
cat answer.txt
