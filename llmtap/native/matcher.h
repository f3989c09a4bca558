#ifndef LLMTAP_MATCHER_H
#define LLMTAP_MATCHER_H

int llmtap_matcher_abi(void);

#endif
