#ifndef LLMTAP_FRAMING_H
#define LLMTAP_FRAMING_H

int llmtap_framing_abi(void);

#endif
